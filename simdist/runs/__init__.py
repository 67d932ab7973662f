"""From a scenario to runs: plan, prices, delays, and the directory for them."""
