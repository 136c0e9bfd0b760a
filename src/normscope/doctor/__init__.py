"""The doctor: finds every normalization in a model, measures it on the user's data, and reports findings.

``session`` runs the user's model and puts everything back; ``sites`` finds where normalizations run;
``probes`` measure (one measurement a file); ``rules`` read what was measured (one rule a file);
``check`` puts them together; ``report`` is what comes out.
"""
