"""Tasks: what ranks run, and what goes back. A cell, a part of a namespace, the dry run of a cell."""
