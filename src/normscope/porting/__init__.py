"""Normalizations carried between Keras, Flax and PyTorch: parameters, statistics and every convention.

``port.py`` is the way in; one framework's names a file (``keras.py``, ``flax.py``, ``torch.py``); ``build.py`` makes
the torch layer of a specification, ``settings.py`` says how a layer elsewhere is made.
"""
