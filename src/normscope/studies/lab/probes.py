"""Linear readers of features: what stands in them openly."""

from __future__ import annotations

from torch import Tensor


def read(x: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """The accuracy on the test part of logistic regression on standardized features (N, D), from scikit-learn.

    >>> import torch
    >>> x, labels = torch.linspace(-1, 1, 20)[:, None], torch.arange(20) // 10
    >>> read(x, labels, x, labels)
    1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    few = x.shape[1] <= 50  # then a method of second order takes a few steps, and needs less of a penalty
    reader = make_pipeline(
        StandardScaler(),
        LogisticRegression(
            C=10.0 if few else 0.01, solver="newton-cholesky" if few else "lbfgs", max_iter=500
        ),
    )
    with threadpool_limits(1):  # like everything that a cell does
        reader.fit(x.double().numpy(), labels.numpy())
        return float(reader.score(test.double().numpy(), test_labels.numpy()))


def explained(x: Tensor, target: Tensor, test: Tensor, test_target: Tensor) -> float:
    """The share of the variance of a number that ridge regression on standardized features (N, D) explains on the test
    part; 0 where it explains nothing.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 100)[:, None]
    >>> round(explained(x, 3 * x[:, 0], x, 3 * x[:, 0]), 2)
    1.0
    """
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    reader = make_pipeline(StandardScaler(), Ridge(alpha=1.0))
    with threadpool_limits(1):
        reader.fit(x.double().numpy(), target.double().numpy())
        return max(0.0, float(reader.score(test.double().numpy(), test_target.double().numpy())))
