"""A report as text, JSON, SARIF, GitHub annotations or a page. Renderers show; they never compute."""
