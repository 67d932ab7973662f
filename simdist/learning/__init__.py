"""When a model reaches the accuracy that is needed, under each schedule.

Two things are put together. *Values*: plans train a task, with exact arithmetic of all ranks, in another process.
*Times*: the same schedules are simulated with the workload and the delays of the scenario. Learning seed i belongs to
delay seed i; where values depend on who was late, those who were late in that simulation are late in that training.
"""
