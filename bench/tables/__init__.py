"""Tables of README.md and docs: each is declared once, beside the rows that it shows."""
