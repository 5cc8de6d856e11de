"""The site of the documentation: `make docs` builds it with Sphinx, from the repository as it lies.

The pages stay plain Markdown, which is read on its own as well. What belongs to the site alone stands here: its order
(toc.yml), its looks (static/), and which files of the repository it consists of. The reference is made from docstrings.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from IPython.lib.lexers import IPython3Lexer
from sphinx.highlighting import lexers

from nbaccel import __version__, logging, optimizer, scheduler, tracking

# Of torch, to an extension that looks at all objects of the process.
warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)

project = "nbaccel"
author = "the developers of nbaccel"
copyright = f"{author}; Apache-2.0"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
    "sphinx_external_toc",
]

# The source is the whole repository: links between pages, notebooks and files hold there as they hold here.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "dist", "nbaccel", "tests", "docs/site"]
external_toc_path = "docs/site/toc.yml"
external_toc_exclude_missing = False

# Headings can be linked to as in any renderer of Markdown; the deepest ones are questions and messages.
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []

# Cells begin with magics, in the pages as in the notebooks.
lexers["python"] = IPython3Lexer()

# Notebooks as they are stored. Nothing is loaded from elsewhere: no widgets' scripts, no formulas' scripts.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_merge_streams = True

# Docstrings: names between single backticks are code, and a link where the reference has them.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_use_admonition_for_examples = False
add_module_names = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"

# Classes that programs import under another name than their own are described like the others, not as its alias.
for _module, _names in {
    logging: ["MultiProcessAdapter"],
    optimizer: ["AcceleratedOptimizer"],
    scheduler: ["AcceleratedScheduler"],
    tracking: [tracker for tracker in dir(tracking) if tracker.endswith("Tracker")],
}.items():
    for _name in _names:
        getattr(_module, _name).__name__ = _name

html_theme = "furo"
html_title = f"nbaccel {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_additional_pages = {"index": "start.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {"navigation_with_keys": True}

# A prompt is not copied with a command, nor what it prints.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
