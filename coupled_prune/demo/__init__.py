"""The demo behind `python -m coupled_prune`.

`model` has the data and the model, `training` trains it dense or pruned along the way, `report` compares.
Everything is made from one seed.
"""
