"""How far a number of this workbench can be trusted."""
