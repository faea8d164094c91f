"""Runs that were measured, a file each: its docstring has the result, `config` the configuration.

seerjax train --recipe=NAME                      a file of this folder
seerjax train --recipe=my_module:my_config       a function of your own
"""
