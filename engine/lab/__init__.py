"""Tools of the laboratory: they look at what an engine did, and do it again."""
