/* How the search of the site weighs what it finds: first pages that say what to do, then the reference, then pages that
   give reasons or show outputs. The numbers are those of Sphinx but for names: a member or a flag whose name only begins
   as the words do stands behind the pages about them. A heading that has all words as they were typed stands first. */
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(docs\/design\/|notebooks\/|CHANGELOG|CONTRIBUTING)/.test(docname)) return score / 2;
    if (kind === "title") return score * 3;
    if (/^docs\/reference\//.test(docname) && kind === "text") return score * 0.75;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 3,
  objPrio: { 0: 5, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
