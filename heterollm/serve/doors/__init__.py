"""Doors of the server: each reads one program's requests and writes answers and errors in its form."""
