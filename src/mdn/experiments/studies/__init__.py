"""`mdn study`: where momentum pays, and where it does not. One module per study, tasks as pure generators of data.

``study`` has what they share (tasks, cells, the choice of the learning rate) and ``contestants`` the models. From the
recorded cells, ``summary`` makes the tables and figures, ``findings`` the comparisons, ``answers`` the sentences,
``overview`` the figure of all studies, and ``pages`` the generated parts of the documentation.
"""
