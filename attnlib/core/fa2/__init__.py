"""FlashInfer's fa2: a model of the plans that its host planner makes."""
