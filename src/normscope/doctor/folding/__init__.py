"""Whether a fold would leave the function as it is: the maps beside a norm, and everybody who sees what it would move.

Read by the probe ``foldable``, and by ``normscope.transforms.fold``, which carries out what is allowed here.
"""
