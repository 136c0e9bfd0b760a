"""How each library's callables become a `Box`: one library a file, each with ``adapt(fn, example) -> Box | None``.

An adapter looks for its library among the loaded modules and imports nothing that is not loaded, so that a NumPy
function is identified without torch.
"""
