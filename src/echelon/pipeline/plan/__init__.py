"""Pipeline schedules as values: data, checker, simulator, costs and programs. Pure."""
