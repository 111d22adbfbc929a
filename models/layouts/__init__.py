"""Cache layouts by name. A new one is a file here and a line in the table."""

from .paged import HeadMajor, TokenMajor

LAYOUTS = {"token_major": TokenMajor, "head_major": HeadMajor}
