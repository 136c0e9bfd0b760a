"""ONNX graphs: what they hold, and the normalizations in them."""
