"""Every normalization of a file, a model or a graph as a list, and two such lists compared.

``listed.py`` says what a list is, ``lists.py`` makes it of a target, ``pairing.py`` pairs two up by name,
``differences.py`` compares one pair, ``comparison.py`` all of them.
"""
