"""An empty module for a package that imports OpenCV, and whose notebooks here do not use it."""
