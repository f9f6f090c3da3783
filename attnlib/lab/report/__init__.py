"""From records to what is read: tables, figures, HTML. Sees rows, never tensors; needs no torch."""
