"""Models larger than a device: where their parts go, how they are loaded, and how they run. In ranks and scripts.

`module_sizes` counts, `device_plan` decides, `checkpoint_loading` reads, `dispatching` puts parts on their devices, and
`offloaded_block` brings those that wait on the host or on the disk. It hooks in as Accelerate's names and as
`prepare(device_map=...)`. Imports `train` and `base`.
"""
