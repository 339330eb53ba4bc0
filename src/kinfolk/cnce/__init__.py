"""The CNCE estimator experiment of Wu et al., ICLR 2021: bias and variance of estimates with
restricted negatives."""
