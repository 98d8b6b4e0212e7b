"""Questions to a head about itself: leave-one-out, the choice of rho, influence, calibration, uncertainty."""
