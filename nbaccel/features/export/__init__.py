"""`%accelerate export`: a cell that has run in ranks, with the cells that it needs, as a script. One command.

`ran_cell` reads a cell of the kernel's history, `code_facts` what its code reads, binds and may change; `needed` finds
the cells without which the script would have another result, and `script_text` writes. All that runs in the kernel, and
runs none of the user's code. `exported_cell` is what the script itself imports, in ranks. `first_steps` runs the
beginning of a script in fresh processes (`--check`). May import every folder of the core; nobody imports it but by the
table, and the scripts.
"""
