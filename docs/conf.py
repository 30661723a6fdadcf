"""Sphinx: Markdown pages and the docstrings, with every warning an error (``make docs``)."""

project = "volcano-locks"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "volcano-locks"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["myst.header", "myst.xref_missing"]
