"""From a scenario to runs: plan, prices and delays, and the directory that holds them."""
