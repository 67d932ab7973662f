"""Steps of single ranks, put together into one job."""
