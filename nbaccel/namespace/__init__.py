"""What a notebook holds: its names, what a cell has changed of them, and how that travels. In kernel and ranks.

Imports `base`.
"""
