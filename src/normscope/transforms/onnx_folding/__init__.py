"""What `normscope.transforms.fold` does with an ONNX graph: find scales, plan, rewrite, and compare in runs."""
