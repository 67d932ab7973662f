"""The time until a model reaches the required accuracy, under each schedule.

It combines two results. *Values*: plans train a task in another process, with exact arithmetic of all ranks. *Times*:
the same schedules are simulated with the workload and the delays of the scenario. Learning seed i belongs to delay seed
i. If values depend on late ranks, the ranks that were late in that simulation are also late in that training.
"""
