"""A walk over packages of notebooks: what a method changes in one of their objects comes, or is named.

One object of each kind with state is made before a cell, and the cell changes it in place. `UNSEEN` names what is
neither changed nor named, with the reason.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from nbaccel.namespace.inventory import Inventory, ObjectPlace

WALK: dict[str, dict[str, tuple[str, str]]] = {
    "numpy": {
        "generator": (
            "import numpy as b; a = b.random.default_rng(0)",
            "a.random()",
        ),
        "random state": (
            "import numpy as b; a = b.random.RandomState(0)",
            "a.rand()",
        ),
        "bit generator": (
            "import numpy as b; a = b.random.PCG64(0)",
            "a.random_raw()",
        ),
        "seed sequence": (
            "import numpy as b; a = b.random.SeedSequence(0)",
            "a.spawn(1)",
        ),
        "array": (
            "import numpy as b; a = b.zeros(3)",
            "a.fill(1)",
        ),
        "objects": (
            "import numpy as b; a = b.array([[1], [2, 3]], dtype=object)",
            "a[0].append(5)",
        ),
        "masked": (
            "import numpy as b; a = b.ma.array([1, 2], mask=[0, 0])",
            "a.mask[0] = True",
        ),
        "records": (
            "import numpy as b; a = b.zeros(2, dtype='i4,f8').view(b.recarray)",
            "a.f0[0] = 1",
        ),
        "nditer": (
            "import numpy as b; a = b.nditer(b.arange(3))",
            "next(a)",
        ),
        "ndenumerate": (
            "import numpy as b; a = b.ndenumerate(b.arange(3))",
            "next(a)",
        ),
        "broadcast": (
            "import numpy as b; a = b.broadcast(b.arange(3), b.arange(3))",
            "next(a)",
        ),
        "polynomial": (
            "import numpy as b; a = b.polynomial.Polynomial([1, 2])",
            "a.coef[0] = 4",
        ),
        "vectorize": (
            "import numpy as b; a = b.vectorize(abs)",
            "a.otypes = 'd'",
        ),
    },
    "pandas": {
        "series": (
            "import pandas as b; a = b.Series([1, 2])",
            "a.iloc[0] = 4",
        ),
        "new column": (
            "import pandas as b; a = b.DataFrame({'c': [1]})",
            "a['d'] = 2",
        ),
        "attrs": (
            "import pandas as b; a = b.DataFrame({'c': [1]})",
            "a.attrs['d'] = 2",
        ),
        "index name": (
            "import pandas as b; a = b.DataFrame({'c': [1]})",
            "a.index.name = 'd'",
        ),
        "drop in place": (
            "import pandas as b; a = b.DataFrame({'c': [1, 2]})",
            "a.drop(0, inplace=True)",
        ),
        "categories": (
            "import pandas as b; a = b.Series(['x', 'y'], dtype='category')",
            "a.iloc[0] = 'y'",
        ),
        "strings": (
            "import pandas as b; a = b.Series(['x', 'y'], dtype='string')",
            "a.iloc[0] = 'z'",
        ),
        "nullable": (
            "import pandas as b; a = b.array([1, None], dtype='Int64')",
            "a[0] = 4",
        ),
        "datetimes": (
            "import pandas as b; a = b.Series(b.date_range('2020', periods=2))",
            "a.iloc[0] = b.Timestamp('2021')",
        ),
        "name of a series": (
            "import pandas as b; a = b.Series([1, 2])",
            "a.name = 'd'",
        ),
        "store of rows": (
            "import pandas as b; a = b.DataFrame({'c': [1, 2]}).iterrows()",
            "next(a)",
        ),
        "reader in chunks": (
            "import pandas as b, io; a = b.read_csv(io.StringIO('c\\n1\\n2\\n'), chunksize=1)",
            "next(a)",
        ),
        "styler": (
            "import pandas as b; a = b.DataFrame({'c': [1]}).style",
            "a.set_caption('d')",
        ),
        "group": (
            "import pandas as b; a = b.DataFrame({'c': [1]}).groupby('c')",
            "a.sort = False",
        ),
    },
    "matplotlib": {
        "axes limits": (
            "from matplotlib.figure import Figure; a = Figure().subplots()",
            "a.set_xlim(0, 3)",
        ),
        "image": (
            "from matplotlib.figure import Figure; a = Figure().subplots().imshow([[1, 2]])",
            "a.set_data([[3, 4]])",
        ),
        "scatter": (
            "from matplotlib.figure import Figure; a = Figure().subplots().scatter([1], [2])",
            "a.set_offsets([[3, 4]])",
        ),
        "colours": (
            "import matplotlib as b; a = b.colors.Normalize()",
            "a(__import__('numpy').arange(3.))",
        ),
        "scalar mappable": (
            "import matplotlib.cm as b; a = b.ScalarMappable()",
            "a.set_array([1, 2])",
        ),
        "colormap": (
            "import matplotlib as b; a = b.colormaps['viridis'].copy()",
            "a.set_bad('r')",
        ),
        "rc": (
            "import matplotlib as b; a = b.RcParams(b.rcParams)",
            "a['lines.linewidth'] = 9",
        ),
        "rcParams": (
            "import matplotlib as b; a = b.rcParams",
            "a['lines.linewidth'] = 9.5",
        ),
        "figure size": (
            "from matplotlib.figure import Figure; a = Figure()",
            "a.set_size_inches(3, 3)",
        ),
        "transform": (
            "from matplotlib.transforms import Affine2D; a = Affine2D()",
            "a.rotate(1)",
        ),
        "locator": (
            "from matplotlib.ticker import MaxNLocator; a = MaxNLocator()",
            "a.set_params(nbins=3)",
        ),
        "formatter": (
            "from matplotlib.ticker import ScalarFormatter; a = ScalarFormatter()",
            "a.set_scientific(False)",
        ),
        "path": (
            "from matplotlib.path import Path; a = Path([[0, 0], [1, 1]])",
            "a.vertices[0] = 3",
        ),
    },
    "torch": {
        "generator": (
            "import torch; a = torch.Generator()",
            "a.manual_seed(5)",
        ),
        "storage": (
            "import torch; a = torch.zeros(3).untyped_storage()",
            "a.fill_(1)",
        ),
        "module buffer": (
            "import torch; a = torch.nn.BatchNorm1d(2)",
            "a(torch.ones(3, 2))",
        ),
        "optimizer": (
            "import torch; b = torch.nn.Linear(1, 1); a = torch.optim.Adam(b.parameters())",
            "b(torch.ones(1, 1)).sum().backward(); a.step()",
        ),
        "scheduler": (
            "import torch; b = torch.nn.Linear(1, 1); b = torch.optim.SGD(b.parameters(), 1.); "
            "a = torch.optim.lr_scheduler.StepLR(b, 1)",
            "a.step()",
        ),
        "scaler": (
            "import torch; a = torch.amp.GradScaler('cpu')",
            "a.scale(torch.ones(1)); a.update(3.0)",
        ),
        "parameter list": (
            "import torch; a = torch.nn.ParameterList()",
            "a.append(torch.ones(1))",
        ),
        "sparse": (
            "import torch; a = torch.eye(3).to_sparse()",
            "a.mul_(2)",
        ),
        "nested": (
            "import torch; a = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])",
            "a.mul_(2)",
        ),
        "quantised": (
            "import torch; a = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)",
            "a.copy_(torch.zeros(3))",
        ),
        "script trained flag": (
            "import torch; a = torch.jit.script(torch.nn.BatchNorm1d(2))",
            "a.eval()",
        ),
        "script module": (
            "import torch; a = torch.jit.script(torch.nn.BatchNorm1d(2))",
            "a(torch.ones(3, 2))",
        ),
        "swa": (
            "import torch; b = torch.nn.Linear(1, 1); a = torch.optim.swa_utils.AveragedModel(b)",
            "a.update_parameters(b)",
        ),
        "random sampler": (
            "import torch; a = torch.utils.data.RandomSampler(range(4), generator=torch.Generator())",
            "list(a)",
        ),
        "sobol": (
            "import torch; a = torch.quasirandom.SobolEngine(2)",
            "a.draw(3)",
        ),
        "multi-index grad": (
            "import torch; a = torch.ones(2, requires_grad=True)",
            "a.sum().backward()",
        ),
        "grad flag": (
            "import torch; a = torch.ones(2)",
            "a.requires_grad_()",
        ),
        "hook handle": (
            "import torch; b = torch.nn.Linear(1, 1); a = b.register_forward_hook(print)",
            "a.remove()",
        ),
        "attribute of a tensor": (
            "import torch; a = torch.ones(1); a.b = []",
            "a.b.append(1)",
        ),
        "traced module": (
            "import torch; a = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))",
            "a.weight.data.fill_(4)",
        ),
    },
    "sklearn": {
        "sgd": (
            "from sklearn.linear_model import SGDClassifier as b; a = b().partial_fit([[1.], [2.]], [0, 1], [0, 1])",
            "a.partial_fit([[1.], [2.]], [0, 1])",
        ),
        "forest": (
            "from sklearn.ensemble import RandomForestClassifier as b; a = b(2, "
            "warm_start=True).fit([[1.], [2.]], [0, 1])",
            "a.set_params(n_estimators=3).fit([[1.], [2.]], [0, 1])",
        ),
        "boosting": (
            "from sklearn.ensemble import HistGradientBoostingClassifier as b; a = b(max_iter=1, "
            "warm_start=True).fit([[1.]] * 40, [0, 1] * 20)",
            "a.set_params(max_iter=2).fit([[1.]] * 40, [0, 1] * 20)",
        ),
        "neighbours": (
            "from sklearn.neighbors import KNeighborsClassifier as b; a = b(1).fit([[1.], [2.]], [0, 1])",
            "a.fit([[3.], [2.]], [0, 1])",
        ),
        "kd tree": (
            "from sklearn.neighbors import KDTree as b; import numpy as c; a = b(c.ones((3, 2)))",
            "a.query(c.ones((1, 2))); a.reset_n_calls()",
        ),
        "scaler": (
            "from sklearn.preprocessing import StandardScaler as b; a = b()",
            "a.partial_fit([[1.], [2.]])",
        ),
        "vectoriser": (
            "from sklearn.feature_extraction.text import CountVectorizer as b; a = b()",
            "a.fit(['x yy', 'zz'])",
        ),
        "svc": (
            "from sklearn.svm import SVC as b; a = b()",
            "a.fit([[1.], [2.]], [0, 1])",
        ),
        "pipeline": (
            "from sklearn.pipeline import make_pipeline as b; "
            "from sklearn.preprocessing import StandardScaler; a = b(StandardScaler())",
            "a.fit([[1.], [2.]])",
        ),
        "k means": (
            "from sklearn.cluster import MiniBatchKMeans as b; a = b(2).partial_fit([[1.], [2.]])",
            "a.partial_fit([[1.], [5.]])",
        ),
        "birch": (
            "from sklearn.cluster import Birch as b; a = b().partial_fit([[1.], [2.]])",
            "a.partial_fit([[7.]])",
        ),
        "gp": (
            "from sklearn.gaussian_process import GaussianProcessRegressor as b; a = b()",
            "a.fit([[1.], [2.]], [0, 1])",
        ),
    },
    "PIL": {
        "paste": (
            "from PIL import Image; a = Image.new('RGB', (4, 4))",
            "a.paste((1, 2, 3), (0, 0, 2, 2))",
        ),
        "frame": (
            "from PIL import Image; import io; b = io.BytesIO(); c = Image.new('L', (2, 2)); "
            "c.save(b, 'gif', save_all=True, append_images=[Image.new('L', (2, 2), 9)]); "
            "b.seek(0); a = Image.open(b)",
            "a.seek(1)",
        ),
        "info": (
            "from PIL import Image; a = Image.new('L', (2, 2))",
            "a.info['d'] = 1",
        ),
        "palette": (
            "from PIL import Image; a = Image.new('P', (2, 2))",
            "a.putpalette([1] * 768)",
        ),
        "thumbnail": (
            "from PIL import Image; a = Image.new('L', (8, 8))",
            "a.thumbnail((2, 2))",
        ),
        "alpha": (
            "from PIL import Image; a = Image.new('RGBA', (8, 8))",
            "a.putalpha(3)",
        ),
        "pixel access": (
            "from PIL import Image; b = Image.new('L', (8, 8)); a = b.load()",
            "a[0, 0] = 4",
        ),
        "exif": (
            "from PIL import Image; a = Image.new('L', (8, 8)).getexif()",
            "a[1] = 'c'",
        ),
    },
    "scipy": {
        "csr": (
            "import scipy.sparse as b; a = b.eye(3, format='csr')",
            "a.data[0] = 5",
        ),
        "dok": (
            "import scipy.sparse as b; a = b.dok_matrix((2, 2))",
            "a[0, 0] = 5",
        ),
        "rotation": (
            "from scipy.spatial.transform import Rotation as b; a = b.from_rotvec([[0, 0, 1.], [0, 1., 0]])",
            "a[0] = b.identity()",
        ),
        "kd tree": (
            "from scipy.spatial import cKDTree as b; import numpy as c; d = c.ones((3, 2)); a = b(d)",
            "d[0] = 4",
        ),
        "ode": (
            "from scipy.integrate import ode; a = ode(lambda t, y: -y).set_initial_value(1.0)",
            "a.integrate(1.0)",
        ),
        "RK45": (
            "from scipy.integrate import RK45; a = RK45(lambda t, y: -y, 0., [1.], 2.)",
            "a.step()",
        ),
        "spline": (
            "from scipy.interpolate import CubicSpline as b; a = b([0, 1, 2], [1, 2, 3])",
            "a.c[0] = 4",
        ),
        "sobol": (
            "from scipy.stats import qmc; a = qmc.Sobol(2, seed=0)",
            "a.random(2)",
        ),
        "kde": (
            "from scipy.stats import gaussian_kde as b; a = b([1., 2, 3])",
            "a.set_bandwidth(2)",
        ),
        "hull": (
            "from scipy.spatial import Delaunay as b; a = b([[0.0, 0], [0, 1], [1, 0], [1, 1.5], "
            "[3, 3]], incremental=True)",
            "a.add_points([[2, 7.5]])",
        ),
        "disjoint": (
            "from scipy.cluster.hierarchy import DisjointSet as b; a = b([1, 2])",
            "a.merge(1, 2)",
        ),
    },
    "tqdm": {
        "description": (
            "import tqdm, io; a = tqdm.tqdm(total=9, file=io.StringIO())",
            "a.set_description('d')",
        ),
        "postfix": (
            "import tqdm, io; a = tqdm.tqdm(total=9, file=io.StringIO())",
            "a.set_postfix(d=1)",
        ),
        "reset": (
            "import tqdm, io; a = tqdm.tqdm(total=9, file=io.StringIO())",
            "a.reset(total=4)",
        ),
        "iterated": (
            "import tqdm, io; a = tqdm.tqdm([1, 2], file=io.StringIO())",
            "list(a)",
        ),
    },
    "seaborn": {
        "grid": (
            "import matplotlib; matplotlib.use('agg'); import seaborn as b, pandas; "
            "c = pandas.DataFrame({'x': [1, 2], 'y': [1, 2]}); a = b.FacetGrid(c)",
            "a.map_dataframe(b.scatterplot, 'x', 'y')",
        ),
        "plot": (
            "import seaborn.objects as b; a = b.Plot()",
            "a._theme['d'] = 1",
        ),
    },
    "networkx": {
        "weights": (
            "import networkx as b; a = b.path_graph(3)",
            "a[0][1]['w'] = 1",
        ),
        "remove": (
            "import networkx as b; a = b.path_graph(3)",
            "a.remove_node(1)",
        ),
        "digraph": (
            "import networkx as b; a = b.MultiDiGraph()",
            "a.add_edge(1, 2)",
        ),
        "union": (
            "import networkx as b; a = b.utils.UnionFind([1, 2])",
            "a.union(1, 2)",
        ),
    },
    "sympy": {
        "matrix": (
            "import sympy as b; a = b.zeros(2)",
            "a[0, 0] = 1",
        ),
        "sparse": (
            "import sympy as b; a = b.SparseMatrix(2, 2, {})",
            "a[0, 0] = 1",
        ),
        "array": (
            "import sympy as b; a = b.MutableDenseNDimArray([1, 2])",
            "a[0] = 5",
        ),
    },
    "xgboost": {
        "parameter": (
            "import numpy, xgboost as b; c = b.DMatrix(numpy.ones((9, 1)), numpy.ones(9)); a = b.Booster({}, [c])",
            "a.set_param('eta', 0.01)",
        ),
        "attribute": (
            "import numpy, xgboost as b; c = b.DMatrix(numpy.ones((9, 1)), numpy.ones(9)); a = b.Booster({}, [c])",
            "a.set_attr(best='3')",
        ),
        "matrix": (
            "import numpy, xgboost as b; a = b.DMatrix(numpy.ones((9, 1)), numpy.ones(9))",
            "a.set_weight(numpy.ones(9) * 3)",
        ),
        "matrix names": (
            "import numpy, xgboost as b; a = b.DMatrix(numpy.ones((9, 1)), numpy.ones(9))",
            "a.feature_names = ['x']",
        ),
        "classifier": (
            "import numpy, xgboost as b; a = b.XGBRegressor(n_estimators=1)",
            "a.fit(numpy.ones((9, 1)), numpy.ones(9))",
        ),
        "classifier again": (
            "import numpy, xgboost as b; a = b.XGBRegressor(n_estimators=1).fit(numpy.ones((9, 1)), numpy.ones(9))",
            "a.get_booster().set_attr(d='4')",
        ),
    },
    "lightgbm": {
        "booster": (
            "import numpy, lightgbm as b; c = b.Dataset(numpy.arange(99.)[:, None], "
            "numpy.arange(99.)); a = b.Booster({'verbose': -1}, c)",
            "a.update()",
        ),
        "parameter": (
            "import numpy, lightgbm as b; c = b.Dataset(numpy.arange(99.)[:, None], "
            "numpy.arange(99.)); a = b.Booster({'verbose': -1}, c); a.update()",
            "a.reset_parameter({'learning_rate': 0.01})",
        ),
        "data set": (
            "import numpy, lightgbm as b; a = b.Dataset(numpy.arange(99.)[:, None], "
            "numpy.arange(99.), params={'verbose': -1}, free_raw_data=False).construct()",
            "a.set_weight(numpy.ones(99) * 2)",
        ),
        "leaf": (
            "import numpy, lightgbm as b; c = b.Dataset(numpy.arange(99.)[:, None], "
            "numpy.arange(99.)); a = b.Booster({'verbose': -1}, c); a.update()",
            "a.set_leaf_output(0, 0, 4.0)",
        ),
        "regressor": (
            "import numpy, lightgbm as b; a = b.LGBMRegressor(n_estimators=1, verbose=-1)",
            "a.fit(numpy.arange(99.)[:, None], numpy.arange(99.))",
        ),
    },
    "cv2": {
        "background": (
            "import cv2 as b, numpy; b.setNumThreads(0); a = b.createBackgroundSubtractorMOG2()",
            "a.apply(numpy.zeros((9, 9, 3), 'u1'))",
        ),
        "kalman": (
            "import cv2 as b, numpy; a = b.KalmanFilter(2, 1)",
            "a.predict(); a.statePost = numpy.ones((2, 1), 'f')",
        ),
        "meter": (
            "import cv2 as b; a = b.TickMeter()",
            "a.start(); a.stop()",
        ),
        "matcher": (
            "import cv2 as b, numpy; a = b.BFMatcher()",
            "a.add([numpy.ones((2, 2), 'f')])",
        ),
        "capture": (
            "import cv2 as b; a = b.VideoCapture()",
            "a.setExceptionMode(True)",
        ),
        "umat": (
            "import cv2 as b, numpy; a = b.UMat(numpy.zeros((4, 4), 'u1'))",
            "b.circle(a, (2, 2), 1, 255)",
        ),
        "key point": (
            "import cv2 as b; a = b.KeyPoint(1., 2., 3.)",
            "a.size = 9.0",
        ),
        "histogram": (
            "import cv2 as b; a = b.createCLAHE()",
            "a.setClipLimit(9.0)",
        ),
        "picture": (
            "import cv2 as b, numpy; a = numpy.zeros((9, 9, 3), 'u1')",
            "b.circle(a, (4, 4), 2, (255, 0, 0))",
        ),
    },
    "polars": {
        "cell": (
            "import polars as b; a = b.DataFrame({'c': [1, 2]})",
            "a[0, 'c'] = 9",
        ),
        "insert": (
            "import polars as b; a = b.DataFrame({'c': [1, 2]})",
            "a.insert_column(0, b.Series('d', [1, 2]))",
        ),
        "series": (
            "import polars as b; a = b.Series('d', [1, 2])",
            "a[0] = 9",
        ),
        "series extend": (
            "import polars as b; a = b.Series('d', [1, 2])",
            "a.append(b.Series('d', [3]))",
        ),
        "sql": (
            "import polars as b; a = b.SQLContext()",
            "a.register('d', b.DataFrame({'c': [1]}))",
        ),
        "rows": (
            "import polars as b; a = b.DataFrame({'c': [1, 2]}).iter_rows()",
            "next(a)",
        ),
    },
    "requests": {
        "session": (
            "import requests as b; a = b.Session()",
            "a.headers['d'] = 'e'",
        ),
        "cookies": (
            "import requests as b; a = b.Session()",
            "a.cookies.set('d', 'e')",
        ),
        "auth": (
            "import requests as b; a = b.Session()",
            "a.auth = ('d', 'e')",
        ),
        "mount": (
            "import requests as b; a = b.Session()",
            "a.mount('http://d', b.adapters.HTTPAdapter())",
        ),
        "response": (
            "import requests as b; a = b.Response()",
            "a.status_code = 3",
        ),
    },
    "bs4": {
        "tag": (
            "import bs4 as b; a = b.BeautifulSoup('<c><d/></c>', 'html.parser')",
            "a.c['e'] = 'f'",
        ),
        "decompose": (
            "import bs4 as b; a = b.BeautifulSoup('<c><d/></c>', 'html.parser')",
            "a.d.decompose()",
        ),
        "string": (
            "import bs4 as b; a = b.BeautifulSoup('<c>x</c>', 'html.parser')",
            "a.c.string = 'y'",
        ),
    },
    "ipywidgets": {
        "text": (
            "import ipywidgets as b; a = b.HTML('c')",
            "a.value = 'd'",
        ),
        "options": (
            "import ipywidgets as b; a = b.Dropdown(options=['c'])",
            "a.options = ['d', 'e']",
        ),
        "children": (
            "import ipywidgets as b; a = b.VBox()",
            "a.children = [b.Label()]",
        ),
        "layout": (
            "import ipywidgets as b; a = b.HTML('c')",
            "a.layout.width = '3px'",
        ),
        "output": (
            "import ipywidgets as b; a = b.Output()",
            "a.append_stdout('c')",
        ),
        "linked": (
            "import ipywidgets as b; c, d = b.IntText(), b.IntText(); a = b.link((c, 'value'), (d, 'value'))",
            "a.unlink()",
        ),
    },
    "plotly": {
        "trace": (
            "import plotly.graph_objects as b; a = b.Figure()",
            "a.add_scatter(y=[1, 2])",
        ),
        "layout": (
            "import plotly.graph_objects as b; a = b.Figure()",
            "a.update_layout(title='d')",
        ),
        "data": (
            "import plotly.graph_objects as b; a = b.Figure(b.Scatter(y=[1]))",
            "a.data[0].y = [4, 5]",
        ),
    },
    "tokenizers": {
        "vocabulary": (
            "import tokenizers as b; a = b.Tokenizer(b.models.WordLevel({'[UNK]': 0}, unk_token='[UNK]'))",
            "a.add_tokens(['c'])",
        ),
        "pre-tokenizer": (
            "import tokenizers as b; a = b.Tokenizer(b.models.BPE())",
            "a.pre_tokenizer = b.pre_tokenizers.Whitespace()",
        ),
        "model": (
            "import tokenizers as b; a = b.models.BPE()",
            "a.dropout = 0.5",
        ),
        "trained": (
            "import tokenizers as b; a = b.Tokenizer(b.models.BPE())",
            "a.train_from_iterator(['cc dd'], b.trainers.BpeTrainer(show_progress=False))",
        ),
        "encoding": (
            "import tokenizers as b; c = b.Tokenizer(b.models.WordLevel({'[UNK]': 0}, "
            "unk_token='[UNK]')); a = c.encode('d')",
            "a.pad(5)",
        ),
        "trainer": (
            "import tokenizers as b; a = b.trainers.BpeTrainer()",
            "a.vocab_size = 7",
        ),
    },
    "transformers": {
        "config": (
            "from transformers import BertConfig as b; a = b()",
            "a.hidden_size = 3",
        ),
        "tokenizer": (
            "import tokenizers as c; from transformers import PreTrainedTokenizerFast as b; "
            "a = b(tokenizer_object=c.Tokenizer(c.models.WordLevel({'[UNK]': 0}, "
            "unk_token='[UNK]')), unk_token='[UNK]')",
            "a.add_tokens(['d'])",
        ),
        "tokenizer side": (
            "import tokenizers as c; from transformers import PreTrainedTokenizerFast as b; "
            "a = b(tokenizer_object=c.Tokenizer(c.models.WordLevel({'[UNK]': 0}, "
            "unk_token='[UNK]')), unk_token='[UNK]')",
            "a.padding_side = 'left'",
        ),
        "tokenizer special": (
            "import tokenizers as c; from transformers import PreTrainedTokenizerFast as b; "
            "a = b(tokenizer_object=c.Tokenizer(c.models.WordLevel({'[UNK]': 0}, "
            "unk_token='[UNK]')), unk_token='[UNK]')",
            "a.add_special_tokens({'pad_token': '[P]'})",
        ),
        "cache": (
            "import torch; from transformers import DynamicCache as b; a = b()",
            "a.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)",
        ),
        "generation": (
            "from transformers import GenerationConfig as b; a = b()",
            "a.max_length = 4",
        ),
        "encoding": (
            "from transformers import BatchEncoding as b; a = b({'c': [1]})",
            "a['c'].append(4)",
        ),
    },
    "datasets": {
        "format": (
            "import datasets as b; a = b.Dataset.from_dict({'c': [1, 2]})",
            "a.set_format('torch')",
        ),
        "info": (
            "import datasets as b; a = b.Dataset.from_dict({'c': [1, 2]})",
            "a.info.description = 'd'",
        ),
        "transform": (
            "import datasets as b; a = b.Dataset.from_dict({'c': [1, 2]})",
            "a.set_transform(dict)",
        ),
        "stream": (
            "import datasets as b; a = b.Dataset.from_dict({'c': [1, 2]}).to_iterable_dataset()",
            "a.set_epoch(3)",
        ),
        "iterator": (
            "import datasets as b; a = iter(b.Dataset.from_dict({'c': [1, 2]}))",
            "next(a)",
        ),
    },
    "h5py": {
        "file in memory": (
            "import h5py as b; a = b.File('x', 'w', driver='core', backing_store=False)",
            "a['d'] = [1, 2]",
        ),
    },
    "statsmodels": {
        "model": (
            "import numpy, statsmodels.api as b; a = b.OLS(numpy.arange(3.), numpy.ones(3))",
            "a.endog[0] = 4",
        ),
    },
    "duckdb": {
        "connection": (
            "import duckdb as b; a = b.connect(':memory:')",
            "a.execute('create table d (e int)')",
        ),
        "result": (
            "import duckdb as b; c = b.connect(':memory:'); a = c.execute('select * from range(5)')",
            "a.fetchone()",
        ),
    },
    "pyarrow": {
        "writer": (
            "import pyarrow as b; c = b.BufferOutputStream(); a = b.ipc.new_stream(c, b.schema([('d', b.int64())]))",
            "a.write(b.record_batch([[1]], names=['d']))",
        ),
        "array over numpy": (
            "import pyarrow as b, numpy; c = numpy.zeros(3); a = b.array(c)",
            "c[0] = 1",
        ),
    },
    "sqlite3": {
        "connection": (
            "import sqlite3 as b; a = b.connect(':memory:')",
            "a.execute('create table d (e)')",
        ),
        "cursor": (
            "import sqlite3 as b; c = b.connect(':memory:'); a = c.execute('select 1 union select 2')",
            "a.fetchone()",
        ),
        "rows": (
            "import sqlite3 as b; a = b.connect(':memory:'); a.execute('create table d (e)')",
            "a.execute('insert into d values (1)')",
        ),
        "row factory": (
            "import sqlite3 as b; a = b.connect(':memory:')",
            "a.row_factory = b.Row",
        ),
    },
}
UNSEEN = {
    "pandas-group": "settings of a grouping, which is made for one use",
    "torch-attribute of a tensor": "attributes of tensors are not read: there are too many tensors",
    "h5py-file in memory": "the contents of files are not compared",
    "pyarrow-writer": "pyarrow's own objects are not read, and its tables do not change",
    "sqlite3-cursor": "a cell that uses a connection of the notebook is refused before the start",
}


def places_after(cell: str, notebook: dict[str, Any]) -> set[str]:
    inventory = Inventory([name for name in notebook if not name.startswith("__")], notebook)
    exec(cell, notebook)
    changed = {str(ObjectPlace(*change.token)) for change in inventory.changes()}
    return changed | inventory.stayed.keys() | inventory.unlooked.keys()


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "kind"),
    [
        pytest.param(package, kind, id=f"{package}-{kind}")
        for package, kind in itertools.chain.from_iterable(zip(itertools.repeat(each), WALK[each]) for each in WALK)
    ],
)
def test_what_a_method_changes_in_an_object_of_a_package_comes_or_is_named(
    package: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")  # OpenCV sets it
    pytest.importorskip(package, reason="a package that notebooks use, and nbaccel does not")
    before, cell = WALK[package][kind]
    notebook: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(before, notebook)
        always = places_after("", notebook)
        after = places_after(cell, notebook)
    assert always <= after  # what cannot be compared is named each time
    assert bool({place[0] for place in after} & set("abcd")) == (f"{package}-{kind}" not in UNSEEN)
