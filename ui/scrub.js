// What a figure shows changes while a slider is moved, by sets that were worked out before: points of Values change sides, the text
// of Tokens its shades, and the lines at the budget go along. The server's answer, with all that depends on them, takes a fifth of a second; it brings a new figure, and
// what is drawn here goes with the old one.

const KEPT = 2 // the plane's trace of what is kept
const GONE = 128 // no head keeps a token
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
const has = (bits, i) => (bits[i >> 3] >> (7 - (i & 7))) & 1

// Two paths, over the points and below the arrows.
function paths(trace, look) {
  const next = trace.nextElementSibling
  if (next?.classList.contains("kv-scrub")) return [next, ...next.children]
  const [group, crosses, dots] = ["g", "path", "path"].map((tag) => document.createElementNS(trace.namespaceURI, tag))
  group.classList.add("kv-scrub")
  crosses.style.cssText = `fill:none;stroke:${look.evicted};stroke-width:${look.line}px`
  dots.style.cssText = `fill:${look.kept};stroke:${look.rim};stroke-width:1px`
  group.append(crosses, dots)
  trace.after(group)
  return [group, crosses, dots]
}

function plane(data) {
  const points = new Float32Array(bytes(data.points).buffer), now = bytes(data.kept), look = data.look
  return (wanted) => {
    const plot = document.querySelector(".st-key-plane .js-plotly-plot")
    if (!plot?._fullLayout) return
    const trace = [...plot.querySelectorAll(".scatterlayer .trace")].find((t) => t.__data__?.[0]?.trace.index === KEPT)
    const drawn = trace?.querySelectorAll("path.point")
    if (drawn?.length !== data.count) return // another answer's figure
    const { xaxis, yaxis } = plot._fullLayout
    const arm = Math.abs(yaxis.l2p(look.arm) - yaxis.l2p(0)), r = look.dot / 2
    let [crosses, dots, kept, at] = ["", "", 0, 0]
    for (let i = 0; i < points.length / 2; i++) {
      const was = has(now, i), will = has(wanted, i)
      kept += will
      if (was) drawn[at++].style.visibility = will ? "" : "hidden"
      if (was === will) continue
      const x = xaxis.l2p(points[2 * i]), y = yaxis.l2p(points[2 * i + 1])
      if (will) dots += `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`
      else crosses += `M${x - arm},${y - arm}L${x + arm},${y + arm}M${x - arm},${y + arm}L${x + arm},${y - arm}`
    }
    const [group, ...both] = paths(trace, look)
    both.forEach((path, i) => path.setAttribute("d", [crosses, dots][i]))
    group.dataset.kept = kept
  }
}

function strip(data) {
  return (wanted) => {
    const tokens = document.querySelector(".kv-strip")?.children
    if (tokens?.length !== wanted.length) return
    wanted.forEach((code, i) => {
      const { classList } = tokens[i], name = data.classes[code % GONE]
      if (classList[0] !== name) classList.replace(classList[0], name)
      classList.toggle("kv-gone", code >= GONE)
    })
  }
}

// The lines at the present budget, each on the axis of its figure.
function lines(x) {
  for (const line of document.querySelectorAll(".kv-here")) {
    const [low, high, log] = ["low", "high", "log"].map((key) => +line.dataset[key])
    line.style.setProperty("--at", ((log ? Math.log10(x) : x) - low) / (high - low))
  }
}

const FIGURES = { plane, strip }

let stop = () => {} // ends what the call before has begun: Streamlit calls again with new data, and ends only the last

export default function ({ data }) {
  stop()
  const draw = FIGURES[data.kind]?.(data)
  const watching = new MutationObserver((changes) => {
    for (const { target } of changes) {
      const name = data.sliders.find((key) => target.closest(`.st-key-${CSS.escape(key)}`))
      if (!name) continue
      const position = target.getAttribute("aria-valuetext")
      const [wanted, x] = [data.sides, data.lines].map((known) => known?.[name]?.[position])
      if (wanted) draw(bytes(wanted))
      if (x !== undefined) lines(x)
    }
  })
  watching.observe(document.body, { subtree: true, attributeFilter: ["aria-valuetext"] })
  stop = () => watching.disconnect()
  return stop
}
