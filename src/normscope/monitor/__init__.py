"""Watching a training run: ``normscope.Monitor``, and callbacks for Lightning and transformers' Trainer.

``watch.py`` counts updates at every step, ``look.py`` measures one step in many, ``verdict.py`` applies the doctor's
rules to both, ``ranks.py`` compares ranks, ``writers.py`` writes numbers down. Loading this package loads no torch.
"""
