"""FlashInfer's fa2 in graphs, promised as many queries of each request."""
