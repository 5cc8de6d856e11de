"""What `%accelerate doctor`, `memory` and `why` answer, and the form and the table of `%accelerate config`.

They hook in as these commands, and as `nbaccel doctor`. They read, and but for the form they change nothing. Runs in
the kernel and in a terminal. Imports `notebook`, `launching`, `namespace`, `train`, `options` and `base`.
"""
