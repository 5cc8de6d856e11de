"""From the bytes that ranks write to what a person sees. Runs in the kernel; knows nothing of processes."""
