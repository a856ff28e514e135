"""Programs that show the metrics of runs: TensorBoard, W&B, MLflow, Trackio. No run depends on one of them."""
