"""Plans for people: the printout, costs in numbers and in symbols, why a plan is as it is, two plans side by side."""
