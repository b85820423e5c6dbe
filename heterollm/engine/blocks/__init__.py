"""The emitters of a layer's blocks, one file for each kind of :mod:`heterollm.model.blocks`."""
