"""Generalization estimates."""
class Estimates: pass
