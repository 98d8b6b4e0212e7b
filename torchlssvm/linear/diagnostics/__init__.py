"""Diagnostics of a fitted head: leave-one-out, the choice of rho, influence, calibration, uncertainty."""
