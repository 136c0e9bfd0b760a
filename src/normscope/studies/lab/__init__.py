"""What studies work with: the declaration, the runner, intervals, verdicts, data, training, figures, pages."""
