"""`mdn study`: where momentum pays, and where it does not. One module per study, tasks as pure generators of data.

``study`` has what they share (tasks, cells, the choice of the learning rate), ``contestants`` the models, ``results``
the tables and figures, ``pages`` the generated parts of the documentation.
"""
