"""The steps of ``explain``, one a file, in the order in which a careful engineer looks."""
