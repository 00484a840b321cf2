"""`bench prepare`: chats into rows, measured.

config     what may be asked for                      reference  the published way: datasets.map and its grouping
data       the same chats for every form, in files    core       tokens a CPU second of one core, against the reference
scaling    the job itself by workers                  memory     the job itself on data of several object stores
run        the parts, one after the other             tree       CPU seconds and memory of a tree of processes
"""
