"""Following one forward pass: which module runs, which normalizations are called, and what feeds what."""
