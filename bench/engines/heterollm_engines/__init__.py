"""Other engines for `heterollm bench`: each computes with the weights that heterollm computes with."""
