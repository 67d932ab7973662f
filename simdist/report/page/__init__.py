"""One HTML page that holds all it shows: text, charts, data and scripts. It requests nothing from anywhere.

`reading.read_report` reads run directories and `pages.runs_page` makes the page of them;
`sweep_model.read_sweep_report` and `pages.sweep_page` do the same for a sweep. The sections stand in `sections`; all
that a user wrote goes through `html`, which escapes it.
"""
