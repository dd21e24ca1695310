// Points change sides while a slider is moved, by sets that were worked out before. The server's answer, which also moves the
// arrows and the numbers, takes a fifth of a second; it brings a new figure, and what is drawn here goes with the old one.

const KEPT = 2 // the figure's trace of what is kept
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
const has = (bits, i) => (bits[i >> 3] >> (7 - (i & 7))) & 1

export default function ({ data }) {
  const points = new Float32Array(bytes(data.points).buffer)
  const now = bytes(data.kept)
  const n = points.length / 2

  function paths(trace) {
    const next = trace.nextElementSibling
    if (next?.classList.contains("kv-scrub")) return [next, ...next.children]
    const [group, crosses, dots] = ["g", "path", "path"].map((tag) => document.createElementNS(trace.namespaceURI, tag))
    group.classList.add("kv-scrub")
    crosses.style.cssText = `fill:none;stroke:${data.look.evicted};stroke-width:${data.look.line}px`
    dots.style.cssText = `fill:${data.look.kept};stroke:${data.look.rim};stroke-width:1px`
    group.append(crosses, dots)
    trace.after(group) // below the arrows
    return [group, crosses, dots]
  }

  function draw(plot, wanted) {
    const trace = [...plot.querySelectorAll(".scatterlayer .trace")].find((t) => t.__data__?.[0]?.trace.index === KEPT)
    if (!trace) return
    const { xaxis, yaxis } = plot._fullLayout
    const drawn = trace.querySelectorAll("path.point")
    if (drawn.length !== data.count) return // another answer's figure
    const arm = Math.abs(yaxis.l2p(data.look.arm) - yaxis.l2p(0)), r = data.look.dot / 2
    let [crosses, dots, kept, at] = ["", "", 0, 0]
    for (let i = 0; i < n; i++) {
      const was = has(now, i), will = has(wanted, i)
      kept += will
      if (was) drawn[at++].style.visibility = will ? "" : "hidden"
      if (was === will) continue
      const x = xaxis.l2p(points[2 * i]), y = yaxis.l2p(points[2 * i + 1])
      if (will) dots += `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`
      else crosses += `M${x - arm},${y - arm}L${x + arm},${y + arm}M${x - arm},${y + arm}L${x + arm},${y - arm}`
    }
    const [group, ...both] = paths(trace)
    both.forEach((path, i) => path.setAttribute("d", [crosses, dots][i]))
    group.dataset.kept = kept
  }

  const watching = new MutationObserver((changes) => {
    const plot = document.querySelector(".st-key-plane .js-plotly-plot")
    for (const { target } of changes) {
      const name = Object.keys(data.sides).find((key) => target.closest(`.st-key-${CSS.escape(key)}`))
      const wanted = name && data.sides[name][target.getAttribute("aria-valuetext")]
      if (wanted && plot?._fullLayout) draw(plot, bytes(wanted))
    }
  })
  watching.observe(document.body, { subtree: true, attributeFilter: ["aria-valuetext"] })
  return () => watching.disconnect()
}
