"""`mdn report`: everything found in run folders on one self-contained page, with a spectral explorer."""
