"""A layer over the file systems, which takes what the ranks of a check write. Runs in the kernel and in ranks."""
