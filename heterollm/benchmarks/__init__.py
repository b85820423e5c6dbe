"""What ``heterollm bench`` does: configurations in processes of their own, which take turns, and rows of it.

Read ``run.py`` first: it asks ``crew.py`` for processes, takes samples in turns, and fills ``rows.py``.
"""
